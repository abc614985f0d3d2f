"""Archives of this Python environment, and the folder that is copied to nodes."""
