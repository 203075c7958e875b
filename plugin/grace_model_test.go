package plugin_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

var graceSeeds = flag.Int("grace-seeds", 100, "how many random lives TestGraceModel compares with the model")

// modelGrace is the grace period of the model.
const modelGrace = time.Minute

// life is an instance in the model, or a service for its own sake.
type life struct {
	confirmed bool          // listed since the last outage, or that was long ago
	lacking   bool          // the registry's complete answers lack it
	age       time.Duration // for so long, without outages and doubt
}

// modelService is a service in the model. Its own life has the ID "".
type modelService struct {
	lives map[string]*life
	doubt bool          // the last answer may be incomplete
	since time.Duration // the time without outages since the last one
}

// absent is what the answers alone say of an instance that is missing: since
// when, and how much of that time had no complete answers.
type absent struct {
	at      time.Time
	without time.Duration
}

// graceModel does in plain steps of time what Grace does by comparing clocks.
type graceModel struct {
	services map[string]*modelService
	away     bool
	absences map[[2]string]absent
}

// answer takes an answer about a service; own is its own part of it. It says
// nothing of what is open.
func (m *graceModel) answer(name string, ids []string, own, complete bool, open ...string) {
	s := m.services[name]
	if s == nil {
		if !own {
			return
		}
		s = &modelService{lives: map[string]*life{}}
		m.services[name] = s
	}
	if own {
		ids = append([]string{""}, ids...)
	}
	for _, id := range ids {
		s.lives[id] = &life{confirmed: true}
		delete(m.absences, [2]string{name, id})
	}
	s.doubt = !complete
	for id, l := range s.lives {
		if !complete || slices.Contains(ids, id) || l.lacking || slices.Contains(open, id) {
			continue
		}
		if l.confirmed && !m.away {
			delete(s.lives, id)
			continue
		}
		l.lacking = true
		m.absences[[2]string{name, id}] = absent{at: time.Now()}
	}
	m.clean()
}

func (m *graceModel) clean() {
	for name, s := range m.services {
		if len(s.lives) == 0 {
			delete(m.services, name)
		}
	}
}

func (m *graceModel) outage() {
	if m.away {
		return
	}
	m.away = true
	for _, s := range m.services {
		s.question()
	}
}

func (s *modelService) question() {
	s.since = 0
	for _, l := range s.lives {
		l.confirmed = false
	}
}

func (m *graceModel) doubt() {
	for _, s := range m.services {
		for _, l := range s.lives {
			s.doubt = s.doubt || l.lacking
		}
	}
}

// pass lets time pass.
func (m *graceModel) pass(d time.Duration) {
	for id, a := range m.absences {
		if s := m.services[id[0]]; m.away || s != nil && s.doubt {
			a.without += d
			m.absences[id] = a
		}
	}
	if m.away {
		return
	}
	for _, s := range m.services {
		s.since += d
		for id, l := range s.lives {
			switch {
			case l.lacking && s.doubt:
			case l.lacking:
				if l.age += d; l.age >= modelGrace {
					delete(s.lives, id)
				}
			case s.since >= modelGrace:
				l.confirmed = true
			}
		}
	}
	m.clean()
}

// TestGraceModel compares Grace with the model over random outages, doubts,
// answers, leaves and returns. Besides, what is in the catalog although the
// answers lack it was lacking for the grace period at most, not counting the
// time without complete answers.
func TestGraceModel(t *testing.T) {
	for seed := range *graceSeeds {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, uint64(seed)))
			c := plugintest.NewCatalog()
			g := plugin.NewGrace(c, modelGrace, c.Degraded)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go g.Run(ctx)
			m := &graceModel{services: map[string]*modelService{}, absences: map[[2]string]absent{}}
			most := 1 + random.IntN(40) // seconds between two steps
			var steps []string
			for range 1000 {
				name := fmt.Sprint("s", random.IntN(3))
				var answer []string
				for i := range 4 {
					if random.IntN(2) == 0 {
						answer = append(answer, fmt.Sprint("i", i))
					}
				}
				said := fmt.Sprint(name, answer)
				switch random.IntN(14) {
				case 0:
					said = "away"
					g.Away()
					m.outage()
				case 1, 2:
					said = "back"
					g.Back()
					m.away = false
				case 3:
					said = "doubt"
					g.Doubt()
					m.doubt()
				case 4:
					said = "incomplete " + said
					g.Add(svcNamed(name), ids(strings.Join(answer, " ")))
					m.answer(name, answer, true, false)
				case 5:
					said = "removed " + name
					g.Remove(svcNamed(name).Key)
					m.answer(name, nil, false, true)
				case 6:
					said = "only " + name
					g.RemoveOthers(func(key registry.Key) bool { return key.Name == name })
					for other := range m.services {
						if other != name {
							m.answer(other, nil, false, true)
						}
					}
				case 7:
					open := []string{"i0", "i3"}
					said = "of a part " + said
					g.SetPart(svcNamed(name), ids(strings.Join(answer, " ")), ids("i0 i3 i7"))
					m.answer(name, answer, true, true, open...)
				case 8:
					said = "question " + name
					g.Question(svcNamed(name).Key)
					if s := m.services[name]; s != nil {
						s.question()
						s.doubt = true
					}
				case 9, 10, 11:
					d := time.Duration(random.IntN(most)) * time.Second
					said = d.String()
					time.Sleep(d)
					synctest.Wait()
					m.pass(d)
				default:
					g.Set(svcNamed(name), ids(strings.Join(answer, " ")))
					m.answer(name, answer, true, true)
				}
				steps = append(steps, said)
				want, instances, retained := services{}, 0, false
				for name, s := range m.services {
					var all []string
					for id, l := range s.lives {
						if retained = retained || l.lacking; id != "" {
							all = append(all, id)
						}
					}
					slices.Sort(all)
					want[name] = strings.Join(all, " ")
					instances += len(all)
				}
				c.WantIDs(t, said, want)
				if known, _ := g.Instances(); known != instances {
					t.Errorf("%d instances are known, want %d", known, instances)
				}
				c.Look(func(h *plugintest.Held) {
					if (h.Degraded != "") != retained {
						t.Errorf("degraded with %q, while something is retained: %t", h.Degraded, retained)
					}
					for id, a := range m.absences {
						if !slices.Contains(strings.Fields(h.IDs(id[0])), id[1]) {
							continue
						}
						if counted := time.Since(a.at) - a.without; counted > modelGrace {
							t.Errorf("%s of %s is served after %v with answers that lack it", id[1], id[0], counted)
						}
					}
				})
				if t.Failed() {
					t.Fatalf("seed %d, after %s", seed, strings.Join(steps[max(0, len(steps)-30):], ", "))
				}
			}
		})
	}
}
