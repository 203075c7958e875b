package access

import (
	"crypto/fips140"
	"os"
	"os/exec"
	"testing"
)

// The listeners work with the validated implementations of FIPS 140-3: the
// tests of TLS pass in a process that uses no others.
func TestFIPS(t *testing.T) {
	if fips140.Enabled() {
		t.Skip("every test is this one")
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^(TestTLS|TestRules|TestFIPSMode)$")
	cmd.Env = append(os.Environ(), "GODEBUG=fips140=on", "ISTHMUS_TEST_FIPS=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestFIPSMode is a part of TestFIPS.
func TestFIPSMode(t *testing.T) {
	if os.Getenv("ISTHMUS_TEST_FIPS") != "" && !fips140.Enabled() {
		t.Error("the mode is off")
	}
}
