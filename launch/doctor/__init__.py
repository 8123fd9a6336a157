"""`warmroute doctor`: facts gathered by `launch.doctor.probe`, judged by the pure functions of ``checks_*``."""
