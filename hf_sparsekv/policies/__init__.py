"""Selection policies: what a decode step attends to. Importing a file registers its method: lists show them so."""

from . import two_level as two_level

# isort: split
from . import layer_ahead as layer_ahead  # a predictor of the next one's method
from . import predictive as predictive
from . import progressive as progressive
from . import streaming as streaming
