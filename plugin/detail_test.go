package plugin

import "testing"

// TestDetail shows that how a registry is followed travels with its state, once
// for each change.
func TestDetail(t *testing.T) {
	c := newCatalog(nil, nil, limits{})
	r := c.read()
	defer r.close()
	next := func() (text string, sent bool) {
		t.Helper()
		resp, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetStatus().GetDetail(), resp.GetStatus() != nil
	}
	next()
	for _, step := range []struct {
		text string
		sent bool
	}{{"polling", true}, {"polling", false}, {"", true}} {
		c.Detail(step.text)
		text, sent := next()
		if sent != step.sent || sent && text != step.text {
			t.Errorf("Detail(%q): %q, sent %t", step.text, text, sent)
		}
	}
}
