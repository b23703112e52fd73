"""Selection policies: what a decode step attends to. Importing a file registers its method: lists show them so."""

from . import levels as levels

# isort: split
from .ahead import predictive as predictive

# isort: split
from . import streaming as streaming
