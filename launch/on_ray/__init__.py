"""`warmroute up --on ray`: a fleet over the nodes of a Ray cluster, one actor for each instance."""
