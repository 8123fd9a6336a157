"""Workers as real processes, in front of scripted engines."""
