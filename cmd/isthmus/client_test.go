package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// What answers instead of a bridge is told from a bridge that declines.
func TestCall(t *testing.T) {
	for name, tt := range map[string]struct {
		code int
		text string
		want []string // in the error; none: no error
	}{
		"an answer":         {http.StatusOK, `{"a": 1}`, nil},
		"problems":          {http.StatusUnprocessableEntity, `{"a": 1}`, nil},
		"the bridge says":   {http.StatusConflict, `{"error": "no removal is paused"}`, []string{"no removal is paused"}},
		"another program":   {http.StatusOK, "<html>\n", []string{"200 OK", `"<html>\n"`, "after admin="}},
		"no page":           {http.StatusNotFound, "", []string{"404 Not Found", "after admin="}},
		"another program's": {http.StatusForbidden, `{"message": "no"}`, []string{"403 Forbidden", "message", "after admin="}},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method != http.MethodPost || r.URL.Path != "/api/v1/compare" || r.Header.Get("Content-Type") != "application/json" {
					t.Errorf("%s %s %v", r.Method, r.URL, r.Header)
				}
				w.WriteHeader(tt.code)
				_, _ = w.Write([]byte(tt.text))
			}))
			defer s.Close()
			var answer struct{ A int }
			err := new(client).call(t.Context(), strings.TrimPrefix(s.URL, "http://"), "/api/v1/compare", struct{}{}, &answer)
			if (err == nil) != (tt.want == nil) || err == nil && answer.A != 1 {
				t.Fatalf("%v, %+v", err, answer)
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v lacks %q", err, want)
				}
			}
		})
	}
}
