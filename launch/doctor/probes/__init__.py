"""What the doctor reads of this machine, one subject a module; `launch.doctor.probe` puts it together."""
