package bench

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// Median returns the median of each figure of some runs. Differences are those
// of the worst run.
func Median(results []Result) (m Result) {
	of := func(get func(Result) float64) float64 { return median(results, get) }
	percentiles := func(get func(Result) Percentiles) Percentiles {
		return Percentiles{
			of(func(r Result) float64 { return get(r).P50 }), of(func(r Result) float64 { return get(r).P90 }),
			of(func(r Result) float64 { return get(r).P99 }), of(func(r Result) float64 { return get(r).Max }),
		}
	}
	m.Latency = percentiles(func(r Result) Percentiles { return r.Latency })
	m.PingPong = percentiles(func(r Result) Percentiles { return r.PingPong })
	m.Ready = of(func(r Result) float64 { return r.Ready })
	m.UpdatesPerSecond = of(func(r Result) float64 { return r.UpdatesPerSecond })
	m.Stream = of(func(r Result) float64 { return r.Stream })
	m.BareStream = of(func(r Result) float64 { return r.BareStream })
	m.Updates = int64(of(func(r Result) float64 { return float64(r.Updates) }))
	m.Responses = int64(of(func(r Result) float64 { return float64(r.Responses) }))
	m.Bytes = int64(of(func(r Result) float64 { return float64(r.Bytes) }))
	for _, r := range results {
		m.Differences = max(m.Differences, r.Differences)
	}
	if results[0].Upstream != nil {
		m.Upstream = &Upstream{
			Notified:    percentiles(func(r Result) Percentiles { return r.Upstream.Notified }),
			Added:       percentiles(func(r Result) Percentiles { return r.Upstream.Added }),
			Connections: int(of(func(r Result) float64 { return float64(r.Upstream.Connections) })),
			Requests:    of(func(r Result) float64 { return r.Upstream.Requests }),
		}
	}
	for _, p := range results[0].Processes {
		at := func(r Result) Process {
			if i := slices.IndexFunc(r.Processes, func(q Process) bool { return q.Name == p.Name }); i >= 0 {
				return r.Processes[i]
			}
			return Process{}
		}
		m.Processes = append(m.Processes, Process{
			p.Name, of(func(r Result) float64 { return at(r).CPU }), int64(of(func(r Result) float64 { return float64(at(r).Memory) })),
		})
	}
	return m
}

func median(results []Result, get func(Result) float64) float64 {
	var all []float64
	for _, r := range results {
		all = append(all, get(r))
	}
	slices.SortFunc(all, cmp.Compare[float64])
	return (all[(len(all)-1)/2] + all[len(all)/2]) / 2
}

// Write writes a result as a table.
func Write(w io.Writer, o Options, r Result) error {
	if expanded, err := o.expand(); err == nil {
		o = expanded
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name string, p Percentiles) {
		fmt.Fprintf(t, "%s\t%.3g\t%.3g\t%.3g\t%.3g\t\n", name, p.P50, p.P90, p.P99, p.Max)
	}
	fmt.Fprintf(t, "ms\tp50\tp90\tp99\tmost\t\n")
	if u := r.Upstream; u != nil {
		row("a change in the registry, until a sink has it", r.Latency)
		row("until the registry has told a bare subscriber", u.Notified)
		row("from then until a sink has it", u.Added)
	} else {
		row("a change in the plugin, until a sink has it", r.Latency)
	}
	row("a bare ping-pong at that pace", r.PingPong)
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\n%.0f changes in %v; %d sinks of %s received %d updates in %d responses, %.1f MB\n",
		o.Rate*o.Duration.Seconds(), o.Duration, o.Sinks, o.Protocol, r.Updates, r.Responses, float64(r.Bytes)/1e6)
	if o.Names == 0 {
		fmt.Fprintf(w, "the slowest sink received %.0f a second\n", r.UpdatesPerSecond)
	}
	fmt.Fprintf(w, "every sink had all %d instances %.1f s after the start\n\n", o.Services*o.Instances, r.Ready)
	if u := r.Upstream; u != nil {
		fmt.Fprintf(w, "the plugin has %d connections to the registry", u.Connections)
		if u.Requests > 0 {
			fmt.Fprintf(w, " and sends %.0f requests a minute, by the registry's count", u.Requests)
		}
		fmt.Fprintf(w, "\n\n")
	}
	fmt.Fprintf(t, "process\tCPU\tresident\t\n")
	for _, p := range r.Processes {
		fmt.Fprintf(t, "%s\t%.0f %%\t%.0f MB\t\n", p.Name, p.CPU, float64(p.Memory)/1e6)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if r.Stream > 0 {
		fmt.Fprintf(w, "\neach stream takes %.0f kB of the bridge; a bare gRPC stream takes %.0f kB\n", r.Stream/1000, r.BareStream/1000)
	}
	if r.Differences > 0 {
		_, err := fmt.Fprintf(w, "\nNOT EQUAL: sinks hold %d resources otherwise than a new sink\n", r.Differences)
		return err
	}
	_, err := fmt.Fprintf(w, "\nat the end every sink held what a new sink got\n")
	return err
}

// WriteComparison writes a comparison as a table.
func WriteComparison(w io.Writer, o Options, all []Comparison) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "server\tsinks\tp50 ms\tp99 ms\tmost ms\tupdates/s at the slowest\tCPU\tresident\tping-pong p99 ms\t\n")
	for _, c := range all {
		m := c.Median
		var cpu float64
		var memory int64
		for _, p := range m.Processes {
			if p.Name != "sinks" {
				cpu, memory = cpu+p.CPU, memory+p.Memory
			}
		}
		fmt.Fprintf(t, "%s\t%d %s\t%.3g\t%.3g\t%.3g\t%.0f\t%.0f %%\t%.0f MB\t%.3g\t\n", c.Name, o.Sinks, c.Protocol,
			m.Latency.P50, m.Latency.P99, m.Latency.Max, m.UpdatesPerSecond, cpu, float64(memory)/1e6, m.PingPong.P99)
	}
	return t.Flush()
}
