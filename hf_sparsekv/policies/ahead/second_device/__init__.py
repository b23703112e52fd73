"""Predictive selection on a second device.

Importing it registers itself with :class:`..predictive.PredictivePolicy`; nothing else depends on it.
"""

from . import policy as policy
