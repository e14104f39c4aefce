"""What a machine can do, as data with provenance."""
