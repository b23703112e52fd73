"""How close sparse decoding comes to full attention on a real model."""
