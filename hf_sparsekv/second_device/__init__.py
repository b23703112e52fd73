"""Predictive selection on a second device.

Importing it tells :class:`..policies.predictive.PredictivePolicy` that a second device can be had; nothing else knows.
"""

from . import policy as policy
