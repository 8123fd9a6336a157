"""Worker processes behind one port: their parent, which starts, watches and ends them, and the start of each.

May import everything of ``proxy`` below the command line.
"""
