"""Description of the machine, and the file for the figures, of every benchmark."""
