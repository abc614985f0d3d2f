"""What the applications share: reading data files, run folders that resume, progress, and facts of the session."""
