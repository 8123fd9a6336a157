"""Records of the hooks in the connector: the file, and the stages of hand-offs that they give."""
