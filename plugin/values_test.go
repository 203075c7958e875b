package plugin

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// No way of printing a secret shows it.
func TestSecretIsHidden(t *testing.T) {
	t.Parallel()
	s := Secret("hush")
	js, err := json.Marshal(struct{ S Secret }{s})
	if err != nil {
		t.Fatal(err)
	}
	type block struct{ Key Secret }
	c := struct {
		Token Secret
		TLS   *block
	}{s, &block{s}}
	for _, out := range []string{
		s.String(), fmt.Sprint(s), fmt.Sprintf("%v %+v %#v %q %x %d", s, s, s, s, s, s), string(js), s.LogValue().String(),
		fmt.Sprintf("%v %+v %#v", c, c, c), fmt.Sprintf("%+v", *c.TLS),
	} {
		if strings.Contains(out, "hush") || strings.Contains(out, fmt.Sprintf("%x", "hush")) || !strings.Contains(out, "secret") {
			t.Errorf("printed %q", out)
		}
	}
	if Secret("").String() != "" || string(s) != "hush" {
		t.Error("the empty secret is not empty, or a secret cannot be used")
	}
}
