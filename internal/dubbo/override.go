package dubbo

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Override is a rule of an operator that changes parameters of providers.
type Override struct {
	absent   bool // only what is not set
	host     string
	port     int
	params   map[string]string
	priority int
	text     string
}

// ParseOverride parses the URL of a rule: override:// or absent://.
func ParseOverride(text string) (Override, error) {
	scheme, host, port, _, params, err := parse(text)
	if err != nil {
		return Override{}, err
	}
	if scheme != "override" && scheme != "absent" {
		return Override{}, errors.New("it is neither override:// nor absent://")
	}
	o := Override{absent: scheme == "absent", host: host, port: port, params: params, text: text}
	o.priority, _ = strconv.Atoi(params["priority"]) // 0 for none
	return o, nil
}

// everyone reports whether the rule is for every address.
func (o *Override) everyone() bool { return o.host == "0.0.0.0" || o.host == "" }

// changed are the parameters of which a rule is followed. Others are the
// business of Dubbo's consumers; enabled is that of the rule itself.
var changed = []string{"weight", "disabled"}

// fits reports whether the rule is for a provider.
func (o *Override) fits(p *Provider) bool {
	is := func(want, have string) bool { return want == "" || want == anyGroup || want == have }
	switch {
	case o.params["enabled"] == "false":
		return false
	case o.params["side"] != "" && o.params["side"] != "provider":
		return false
	case !o.everyone() && (o.host != p.Address || o.port != 0 && o.port != p.Port):
		return false
	case !is(o.params["group"], p.Name.Group), !is(o.params["version"], p.Name.Version), !is(o.params["application"], p.Params["application"]):
		return false
	}
	for k, v := range o.params {
		if key, ok := strings.CutPrefix(k, "~"); ok && !is(v, p.Params[key]) {
			return false
		}
	}
	return true
}

// Apply returns the providers as the rules change them: those for every address
// first, each kind by priority.
func Apply(rules []Override, all []Provider) []Provider {
	if len(rules) == 0 {
		return all
	}
	rules = slices.SortedFunc(slices.Values(rules), func(a, b Override) int {
		rank := func(o *Override) int {
			if o.everyone() {
				return 0
			}
			return 1
		}
		return cmp.Or(cmp.Compare(rank(&a), rank(&b)), cmp.Compare(a.priority, b.priority), cmp.Compare(a.text, b.text))
	})
	out := slices.Clone(all)
	for i := range out {
		p := &out[i]
		own := false
		for r := range rules {
			if !rules[r].fits(p) {
				continue
			}
			for _, key := range changed {
				v, ok := rules[r].params[key]
				if !ok || rules[r].absent && p.Params[key] != "" {
					continue
				}
				if !own {
					p.Params, own = maps.Clone(p.Params), true
				}
				if p.Params == nil {
					p.Params = map[string]string{}
				}
				p.Params[key] = v
			}
		}
	}
	return out
}
