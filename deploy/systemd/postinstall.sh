#!/bin/sh
# The user of the service; systemd learns of the unit. Nothing is started: the configuration comes first. dpkg --root gives the root of another system.
set -e
systemd-sysusers ${DPKG_ROOT:+--root="$DPKG_ROOT"} isthmus.conf
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
