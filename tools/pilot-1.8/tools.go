//go:build tools
// +build tools

// Package tools names what this module builds besides its own program: the real
// Pilot 1.8.0.
package tools

import _ "istio.io/istio/pilot/cmd/pilot-discovery"
