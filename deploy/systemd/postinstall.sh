#!/bin/sh
# The user of the service; systemd learns of the unit. Nothing is started: the configuration comes first.
set -e
systemd-sysusers isthmus.conf
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
