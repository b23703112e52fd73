"""Every operator's calls, by its name."""

from __future__ import annotations

import attention_operators
import layer_operators
import selection_operators
import storage_operators

GROUPS = (attention_operators, layer_operators, selection_operators, storage_operators)
OPERATORS = [operator for group in GROUPS for operator in group.OPERATORS]
BY_NAME = {operator.of: operator for operator in OPERATORS}
if len(BY_NAME) < len(OPERATORS):
    raise ValueError("two operators of one name: the cases of the first would not run")
