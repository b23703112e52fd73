"""How models write calls of tools and reasoning, read as the text comes. It needs neither torch nor a server.

A form is one file, and :mod:`.known` has them by name. Its reader gets text and tells :mod:`.events`; :mod:`.message`
makes a whole message of these.
"""
