"""``python -m rooftile.cli`` is the command ``rooftile``."""

from rooftile.cli.main import main

main()
