"""What a checkpoint holds, and how it is found, loaded and written."""
