#!/bin/sh
# Stops the service when the package goes, not when it is upgraded: dpkg says "remove", rpm 0.
set -e
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ] && { [ "$1" = remove ] || [ "$1" = 0 ]; }; then systemctl disable --now isthmus.service; fi
