package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/internal/doctor"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/config"
)

func newExplain() *cobra.Command {
	var (
		address, format string
		c               client
	)
	cmd := &cobra.Command{
		Use:   "explain HOST",
		Short: "Explain why a host is served as it is, or not at all",
		Long: `Follow one host from the registries to the sinks: its instances as each registry states them, for each the fields of the
configuration that decided about it, what is served, which sinks have acknowledged it, and what consumers have written of it.
HOST may also be the name of a service in its registry, or of a ServiceEntry.`,
		Example: "  isthmus explain web.example.org --address " + config.Default.Listen.Admin.Address,
		Args:    usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if format != "text" && format != "json" {
				return usageError(cmd, fmt.Errorf("--output %s: must be text or json", format))
			}
			if err := errors.Join(checkAddress(address, config.Default.Listen.Admin.Address), c.check()); err != nil {
				return usageError(cmd, err)
			}
			raw, err := c.explain(cmd.Context(), address, args[0])
			if err != nil {
				return err
			}
			if format == "json" {
				_, err := cmd.OutOrStdout().Write(raw)
				return err
			}
			var e admin.Explanation
			if err := json.Unmarshal(raw, &e); err != nil {
				return fmt.Errorf("the answer of %s: %w", address, err)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), explainText(&e, time.Now()))
			return err
		},
	}
	cmd.Flags().StringVarP(&address, "address", "a", config.Default.Listen.Admin.Address, "admin `ADDRESS` of the bridge, host:port or unix:PATH")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "`FORMAT` of the output: text or json")
	c.flags(cmd.Flags())
	return cmd
}

// explain asks a bridge about a host, and returns the answer as JSON.
func (c *client) explain(ctx context.Context, address, host string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	const cure = "is this the address after admin= in the line \"serving\" of the bridge's log?"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url(address, "/api/v1/explain?host="+url.QueryEscape(host)), nil)
	if err != nil {
		return nil, fmt.Errorf("%w; %s", err, cure)
	}
	resp, err := c.do(req, address)
	if _, unreached := errors.AsType[*url.Error](err); unreached {
		return nil, fmt.Errorf("%w; %s", err, cure)
	}
	if err != nil {
		return nil, err // a flag's
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s: %w", req.URL, err)
	case resp.StatusCode == http.StatusOK && json.Valid(text):
		return text, nil
	}
	var declined struct{ Error string }
	if json.Unmarshal(text, &declined) == nil && declined.Error != "" {
		return nil, errors.New(declined.Error)
	}
	return nil, fmt.Errorf("%s answered %s: %.200q; %s", req.URL, resp.Status, text, cure)
}

// explainText renders an explanation for a terminal.
func explainText(e *admin.Explanation, now time.Time) string {
	var b strings.Builder
	line := func(indent int, format string, args ...any) {
		fmt.Fprintf(&b, "%s%s\n", strings.Repeat("  ", indent), fmt.Sprintf(format, args...))
	}
	line(0, "%s", e.Host)
	for _, s := range e.Summary {
		line(0, "  %s", s)
	}
	if len(e.Conditions) > 0 {
		line(0, "\nwrong now")
		for _, c := range e.Conditions {
			line(1, "%s", c)
		}
	}
	for _, r := range e.Registries {
		line(0, "\nregistry %s (%s, %s)", r.Registry, r.Adapter, r.Phase)
		if r.Error != "" {
			line(1, "cannot be followed: %s", r.Error)
		}
		if r.Unknown != "" {
			line(1, "its instances cannot be shown: %s", r.Unknown)
		}
		if len(r.Services)+len(r.Claims) == 0 && r.Unknown == "" {
			line(1, "does not have it")
		}
		for _, s := range r.Services {
			line(1, "service %s", s.Key)
			for _, step := range s.Steps {
				line(2, "%s", stepText(step))
			}
			if !s.Original && len(s.Instances) > 0 {
				line(2, "(instances as they were translated: this adapter does not retain the registry's own words)")
			}
			for _, i := range s.Instances {
				line(2, "%s", instanceText(&i))
				for _, step := range i.Steps {
					line(3, "%s", stepText(step))
				}
			}
			if s.More > 0 {
				line(2, "and %s", doctor.Count(int(s.More), "more instance", "more instances"))
			}
		}
		for _, c := range r.Claims {
			line(1, "%s: %s, %s", c.Name, c.Outcome, doctor.Count(c.Endpoints, "endpoint", "endpoints"))
			if c.Reason != "" {
				line(2, "%s: %s", c.Rule, c.Reason)
			}
			if c.Rejected != "" {
				line(2, "refused: %s", c.Rejected)
			}
			for _, k := range c.Removals {
				line(2, "protect: %s is still served: %s", k.Name, k.Reason)
			}
		}
	}
	if len(e.Resources) > 0 {
		line(0, "\nserved")
		for _, r := range e.Resources {
			line(1, "%s %s, version %s, of %s", r.Collection[strings.LastIndex(r.Collection, "/")+1:], r.Name, r.Version, r.Registry)
		}
	}
	if len(e.Sinks) > 0 {
		line(0, "\nsinks")
		for _, s := range e.Sinks {
			name := s.Address
			if s.Node != "" {
				name = s.Node + " at " + s.Address
			}
			line(1, "%s (%s, %s, %s): %s", name, s.Protocol, s.Profile, s.Shape, s.State)
			if s.SentVersion != "" {
				line(2, "sent %s%s, acknowledged %s%s", s.SentVersion, since(now, s.SentAt), orDash(s.AckedVersion), since(now, s.AckedAt))
			}
			if s.State == "refused" {
				line(2, "%s", s.LastNack)
			}
		}
	}
	if len(e.Consumers) > 0 {
		line(0, "\nconsumers")
		for _, c := range e.Consumers {
			text := c.Consumer + ": "
			if c.Object != "" {
				text += c.Object + ": "
			}
			text += c.State
			if c.State != "written" && !c.Since.IsZero() {
				text += fmt.Sprintf(" for %v", max(0, now.Sub(c.Since)).Truncate(time.Second))
			}
			if c.Reason != "" {
				text += ": " + c.Reason
			}
			line(1, "%s", text)
		}
	}
	return b.String()
}

func orDash(s string) string {
	if s == "" {
		return "nothing"
	}
	return s
}

func since(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return fmt.Sprintf(" %v ago", max(0, now.Sub(t)).Truncate(time.Second))
}

func stepText(s admin.ExplainedStep) string {
	if s.Subject != "" {
		return fmt.Sprintf("%s: %s: %s", s.Rule, s.Subject, s.Text)
	}
	return fmt.Sprintf("%s: %s", s.Rule, s.Text)
}

// instanceText describes an instance on one line.
func instanceText(i *admin.ExplainedInstance) string {
	parts := []string{"instance " + i.ID}
	add := func(label, value string) {
		if value != "" {
			parts = append(parts, strings.TrimSpace(label+" "+value))
		}
	}
	add("", i.Address)
	add("", strings.Join(i.Ports, ", "))
	add("", i.Health)
	if i.Disabled {
		add("", "disabled")
	}
	add("weight", i.Weight)
	add("", i.Locality)
	add("on", i.Node)
	add("tags", strings.Join(i.Tags, ","))
	var meta []string
	for _, k := range slices.Sorted(maps.Keys(i.Meta)) {
		meta = append(meta, k+"="+i.Meta[k])
	}
	add("", strings.Join(meta, " "))
	if i.Resource == "" {
		add("", "NOT SERVED")
	}
	return strings.Join(parts, "; ")
}
