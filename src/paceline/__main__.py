"""``python -m paceline``."""

from paceline.cli.main import main

main()
