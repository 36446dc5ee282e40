"""Tables of the results, a module each; `scripts.bench` measures them.

A module's docstring says what is measured and how. ``HEADS`` are the heads of the columns. ``rows(item, *,
option=default, ...)`` yields the rows of one item, tuples of texts; the command line has an option for each keyword.
``ITEMS`` are the items where the command line names none; without it they are files that it has to name. A table that
is no plain list of rows yields other JSON values, and ``tables(found, command)`` makes of all that was yielded the
tables by name.
"""
