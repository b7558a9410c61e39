"""A state as bytes: its format, files, restoring and inspecting."""
