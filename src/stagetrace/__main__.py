"""``python -m stagetrace``."""

from .cli import main

main()
