"""Selection policies: what a decode step attends to. Importing a file registers its method: lists show them so."""

from . import two_level as two_level

# isort: split
from .ahead import predictive as predictive

# isort: split
from . import progressive as progressive
from . import streaming as streaming
