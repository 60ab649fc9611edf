"""The commands that run other programs: launch, accelerate, doctor and monitor.

Start in scripts.py, which tells tfopt's own words from those of a script; doctor.py and monitor.py have a command each.
"""
