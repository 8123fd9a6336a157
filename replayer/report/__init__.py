"""The HTML report: inputs, sections, figures and templates.

May import all of the replayer but its command line.
"""
