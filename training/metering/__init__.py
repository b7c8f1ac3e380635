"""The parts of the meter (training/memory.py): books over storages, places, kinds, the course over a step."""
