"""The environment that travels: archives of this Python environment, and the folder that goes to nodes."""
