"""Requests that come and go, against whole systems: traces, a client, the systems, and what is made of their times."""
