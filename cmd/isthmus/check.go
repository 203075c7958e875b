package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/internal/doctor"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// hop is one step on the way of a service to a call.
type hop struct {
	Hop string `json:"hop"` // registry, bridge, sinks, istiod or call
	OK  bool   `json:"ok"`
	// Text says what was found.
	Text string `json:"text"`
	// Cure says what to look at, unless the hop is fine.
	Cure string `json:"cure,omitempty"`
}

// callCheck is what is asked, and where.
type callCheck struct {
	host, address, istiod, proxy, path string
	client                             client
}

func newCheck() *cobra.Command {
	var (
		c       callCheck
		timeout time.Duration
		output  = &oneOf{"text", []string{"text", "json"}}
	)
	cmd := &cobra.Command{
		Use:   "check --call HOST",
		Short: "Find out where a call to a host fails, from its registry to the proxy",
		Long: `Find out where a call to a host fails. Each hop is checked in turn: whether a registry has an instance that gets traffic,
whether the bridge serves it, whether each sink acknowledged it, with --istiod whether istiod has it, and with --proxy whether a call
through that proxy or gateway is answered.

The exit code is 1 if a hop fails.`,
		Example: `  isthmus check --call web.example.org
  isthmus check --call web.example.org --istiod 127.0.0.1:15014 --proxy 127.0.0.1:8080`,
		Args: usageArgs(cobra.NoArgs),
	}
	f := cmd.Flags()
	f.StringVar(&c.host, "call", "", "the `HOST` to call, as clients in the mesh do")
	f.StringVarP(&c.address, "address", "a", config.Default.Listen.Admin.Address, "admin `ADDRESS` of the bridge, host:port or unix:PATH")
	f.StringVar(&c.istiod, "istiod", "", "debug `ADDRESS` of istiod, host:port with port 15014 or 8080")
	f.StringVar(&c.proxy, "proxy", "", "`ADDRESS` of a proxy or gateway that accepts HTTP for the host, as host:port")
	f.StringVar(&c.path, "path", "/", "`PATH` of the call")
	f.DurationVar(&timeout, "timeout", 30*time.Second, "how long all checks may take together")
	f.VarP(output, "output", "o", "format of the result")
	c.client.flags(f)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		err := errors.Join(checkAddress(c.address, config.Default.Listen.Admin.Address), c.client.check())
		if c.host == "" {
			err = errors.Join(err, errors.New("--call HOST is missing"))
		}
		if c.istiod != "" && doctor.PortOf(c.istiod) == "" {
			err = errors.Join(err, fmt.Errorf("--istiod %s: must be host:port, for example 127.0.0.1:15014", c.istiod))
		}
		if !strings.HasPrefix(c.path, "/") {
			err = errors.Join(err, fmt.Errorf("--path %s: must begin with /", c.path))
		}
		if err != nil {
			return usageError(cmd, err)
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		hops := c.run(ctx)
		if output.value == "json" {
			enc := json.NewEncoder(cmd.OutOrStdout())
			enc.SetIndent("", "  ")
			enc.SetEscapeHTML(false)
			err = enc.Encode(struct {
				Host string `json:"host"`
				Hops []hop  `json:"hops"`
			}{c.host, hops})
		} else {
			err = writeHops(cmd.OutOrStdout(), hops)
		}
		if err != nil {
			return err
		}
		if last := hops[len(hops)-1]; !last.OK {
			return fmt.Errorf("%s stops at: %s", c.host, last.Hop)
		}
		return nil
	}
	return cmd
}

func writeHops(w io.Writer, hops []hop) error {
	var b strings.Builder
	for _, h := range hops {
		word := "ok"
		if !h.OK {
			word = "STOP"
		}
		fmt.Fprintf(&b, "%-5s %-9s %s\n", word, h.Hop, h.Text)
		if h.Cure != "" {
			fmt.Fprintf(&b, "%15s %s\n", "", h.Cure)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// run asks each hop, until one stops.
func (c *callCheck) run(ctx context.Context) (hops []hop) {
	text, err := c.client.explain(ctx, c.address, c.host)
	var e admin.Explanation
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	if err != nil {
		return []hop{{Hop: "bridge", Text: err.Error(), Cure: "Is the bridge running, and is --address its admin address?"}}
	}
	steps := []func() hop{func() hop { return registryHop(&e) }, func() hop { return bridgeHop(&e) }, func() hop { return sinksHop(&e) }}
	if c.istiod != "" {
		steps = append(steps, func() hop { return c.istiodHop(ctx, &e) })
	}
	if c.proxy != "" {
		steps = append(steps, func() hop { return c.callHop(ctx) })
	}
	for _, step := range steps {
		h := step()
		if hops = append(hops, h); !h.OK {
			break
		}
	}
	return hops
}

// summary returns what explain says of the cause.
func summary(e *admin.Explanation) string { return strings.Join(e.Summary, " ") }

func isServiceEntry(r *admin.ExplainedResource) bool {
	return strings.HasSuffix(r.Collection, "/ServiceEntry")
}

// registryHop says whether a registry has an instance that is fit for traffic.
func registryHop(e *admin.Explanation) hop {
	for i := range e.Registries {
		r := &e.Registries[i]
		fit := 0
		for _, c := range r.Claims {
			fit += c.Endpoints
		}
		if fit > 0 {
			text := fmt.Sprintf("registry %s (%s, %s) has it with %s fit for traffic", r.Registry, r.Adapter, r.Phase, doctor.Count(fit, "endpoint", "endpoints"))
			if r.Error != "" {
				text += "; it cannot be followed, so this may be old: " + r.Error
			}
			return hop{Hop: "registry", OK: true, Text: text}
		}
	}
	return hop{Hop: "registry", Text: summary(e), Cure: "isthmus explain " + e.Host + " shows every instance and the rules that decided."}
}

// bridgeHop says whether the bridge serves it.
func bridgeHop(e *admin.Explanation) hop {
	i := slices.IndexFunc(e.Resources, func(r admin.ExplainedResource) bool { return isServiceEntry(&r) })
	if i < 0 {
		return hop{Hop: "bridge", Text: "no ServiceEntry of it is served. " + summary(e), Cure: "isthmus explain " + e.Host + " names the rule."}
	}
	r := &e.Resources[i]
	return hop{Hop: "bridge", OK: true, Text: fmt.Sprintf("serves ServiceEntry %s, version %s", r.Name, r.Version)}
}

// sinksHop says whether each sink acknowledged it.
func sinksHop(e *admin.Explanation) hop {
	if len(e.Sinks) == 0 {
		return hop{Hop: "sinks", Text: "no istiod is connected", Cure: "Name the bridge's xDS address in configSources of istiod's mesh configuration (isthmus meshconfig prints it), and restart istiod."}
	}
	acked := 0
	for _, s := range e.Sinks {
		switch s.State {
		case "acknowledged":
			acked++
		case "not in its view", "by name", "not asked":
		default:
			return hop{Hop: "sinks", Text: fmt.Sprintf("%s: %s%s", cmp.Or(s.Node, s.Address), s.State, strings.TrimSuffix(": "+s.LastNack, ": ")), Cure: "isthmus doctor --config FILE --address " + "ADMIN checks the sinks, too."}
		}
	}
	if acked == 0 {
		return hop{Hop: "sinks", Text: "sinks are connected, and none has asked for it or may see it", Cure: "See the views of the listeners, and what the sinks ask for: /api/v1/sinks."}
	}
	return hop{Hop: "sinks", OK: true, Text: doctor.Count(acked, "sink has", "sinks have") + " acknowledged it"}
}

// istiodHop says whether istiod has it.
func (c *callCheck) istiodHop(ctx context.Context, e *admin.Explanation) hop {
	i, err := doctor.ReadIstiod(ctx, c.istiod, getter(&client{}, c.istiod))
	if err != nil {
		return hop{Hop: "istiod", Text: err.Error(), Cure: "--istiod is a debug port, 15014 or 8080; kubectl -n istio-system port-forward deploy/istiod 15014 makes it reachable."}
	}
	for _, r := range e.Resources {
		if isServiceEntry(&r) && !i.Has("ServiceEntry", r.Name) {
			return hop{Hop: "istiod", Text: "it was sent ServiceEntry " + r.Name + " and does not have it: its validation rejects that", Cure: "istiod's log says why; repair what it names in the registry."}
		}
	}
	return hop{Hop: "istiod", OK: true, Text: "has the ServiceEntry"}
}

// callHop calls the host through a proxy or gateway.
func (c *callCheck) callHop(ctx context.Context) hop {
	const cure = "Does the proxy have the host (istioctl proxy-config clusters), does a gateway have a route for it, and does the instance answer by itself?"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.proxy+c.path, nil)
	if err != nil {
		return hop{Hop: "call", Text: err.Error(), Cure: "--proxy is host:port."}
	}
	req.Host = c.host
	// A redirect would be to another host.
	caller := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	began := time.Now()
	resp, err := caller.Do(req)
	if err != nil {
		return hop{Hop: "call", Text: err.Error(), Cure: cure}
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 300)) // for a message
	text := fmt.Sprintf("%s through %s in %s", resp.Status, c.proxy, time.Since(began).Round(time.Millisecond))
	if resp.StatusCode >= http.StatusBadRequest {
		return hop{Hop: "call", Text: fmt.Sprintf("%s: %q", text, strings.TrimSpace(string(body))), Cure: cure}
	}
	return hop{Hop: "call", OK: true, Text: text}
}
