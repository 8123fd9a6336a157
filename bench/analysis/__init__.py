"""What a trace, a model, a GPU and a fleet allow, worked out on paper: no engine runs here."""
