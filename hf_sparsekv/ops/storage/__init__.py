"""Where keys and values lie: appended, sealed into blocks, quantised, copied to the device."""
