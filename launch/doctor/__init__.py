"""`warmroute doctor`: `launch.doctor.probe` gathers facts, the pure functions of ``checks_*`` judge them."""
