package plugin

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// A registry's text that repeats a secret loses it before it is cut, in every
// form that a request has it in.
func TestRedact(t *testing.T) {
	var c struct{ Token Secret }
	if err := json.Unmarshal([]byte(`{"Token": "to/ken+\"0123456789"}`), &c); err != nil {
		t.Fatal(err)
	}
	rememberBasic("ann", "password-1")
	for _, text := range []string{
		`refused: to/ken+"0123456789`, `refused: to%2Fken%2B%220123456789`, `refused: to%2Fken+%220123456789`, `refused: to/ken+\"0123456789`,
		"refused: Basic YW5uOnBhc3N3b3JkLTE=",
	} {
		got := redact(text)
		if !strings.HasSuffix(got, hidden) || strings.Contains(got, "0123456789") {
			t.Errorf("%s is shown as %s", text, got)
		}
	}
	if got := redact("refused: token"); got != "refused: token" {
		t.Errorf("%q: another text is changed", got)
	}
	cat := newCatalog(nil, nil, limits{})
	cat.Degraded(errors.New(strings.Repeat("x", maxReasonBytes-10) + string(c.Token)))
	if strings.Contains(cat.degraded, "to/k") {
		t.Error("a part of the secret is left where the text was cut")
	}
	for n := range 2 * maxSecrets {
		remember(strings.Repeat("s", minSecret+n))
	}
	if len(secrets.known) != maxSecrets {
		t.Errorf("%d secrets are remembered, want %d", len(secrets.known), maxSecrets)
	}
}
