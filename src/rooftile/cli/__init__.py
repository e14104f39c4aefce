"""The command line, one file a verb.

A verb is a module with ``register(app)``, listed in ``main.VERBS``. It imports torch and anything slow inside its
command, calls ``output.check_writable`` before the long work, raises errors of ``rooftile.errors`` (``main.run`` makes
them a sentence and an exit code), and ends its report with ``output.next_command``.
"""
