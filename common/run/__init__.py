"""One run of some ranks: its start, folder, log and end."""
