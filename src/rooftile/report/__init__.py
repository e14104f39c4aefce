"""Terminal and JSON views of an audit."""
