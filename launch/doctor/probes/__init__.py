"""Readers of this machine for the doctor, one subject a module; `launch.doctor.probe` puts the facts together."""
