"""Run real libraries with broken disks, networks, devices and full memories."""
