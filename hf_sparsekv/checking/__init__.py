"""Texts that full attention checks: sparse steps draft tokens, one exact pass looks at them, and a rule keeps some."""
