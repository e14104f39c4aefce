"""A step goes in, one immutable Trace comes out."""
