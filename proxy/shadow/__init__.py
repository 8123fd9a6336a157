"""Shadow decisions of the live proxy: queue, task and figures. May import policies, settings and logs."""
