"""What the target device would run: one written policy per device class."""
