package migrate

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Follow compares two sources until ctx ends. It reports differences that last
// for settle, differences that have ended, and a summary periodically and at
// the end. It returns the last report, and an error of say.
func Follow(ctx context.Context, older, newer *Source, settle, summary time.Duration, say func(line string) error) (*Report, error) {
	begin := time.Now()
	type seen struct {
		since time.Time
		told  bool
	}
	open := map[Difference]seen{}
	told, most := 0, 0
	report, changesA, changesB := &Report{}, -1, -1
	sum := func() string {
		return fmt.Sprintf("%s after %s: %s; %d differences lasted for %s since the start, at most %d at once",
			time.Now().Format(time.RFC3339), time.Since(begin).Round(time.Second), report, told, settle, most)
	}
	tick := time.NewTicker(max(settle/4, 10*time.Millisecond))
	defer tick.Stop()
	next := begin.Add(summary)
	for {
		_, a := older.snapshot()
		_, b := newer.snapshot()
		if a != changesA || b != changesB {
			report, changesA, changesB = Compare(older, newer), a, b
		}
		now := time.Now()
		is := make(map[Difference]bool, len(report.Differences))
		for _, d := range report.Differences {
			is[d] = true
			if _, ok := open[d]; !ok {
				open[d] = seen{since: now}
			}
		}
		lasting := 0
		for _, d := range slices.SortedFunc(maps.Keys(open), func(x, y Difference) int { return strings.Compare(x.String(), y.String()) }) {
			s := open[d]
			switch {
			case !is[d]:
				delete(open, d)
				if s.told {
					if err := say("- " + d.String()); err != nil {
						return report, err
					}
				}
				continue
			case !s.told && now.Sub(s.since) >= settle:
				open[d] = seen{s.since, true}
				told++
				if err := say("+ " + d.String()); err != nil {
					return report, err
				}
			}
			if open[d].told {
				lasting++
			}
		}
		most = max(most, lasting)
		if now.After(next) {
			next = now.Add(summary)
			if err := say(sum()); err != nil {
				return report, err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return report, say(sum())
		}
	}
}
