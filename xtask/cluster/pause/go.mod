module sinabro/cluster/pause

go 1.24
